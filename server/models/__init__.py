"""Models: found on disk, configured, loaded, warmed up, served by their instances, replaced, unloaded."""
