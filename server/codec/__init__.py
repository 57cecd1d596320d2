"""Between wire messages and arrays: checking, decoding, encoding, and a shortcut for requests like earlier ones."""
