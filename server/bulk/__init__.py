"""Offline work: the rows of files through a model, in units of which each is finished or done again."""
