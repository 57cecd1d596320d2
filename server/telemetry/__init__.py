"""What operators see: metrics, logs, traces, probes."""
