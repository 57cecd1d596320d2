"""Between wire messages and arrays: checking, decoding, encoding, and the short way for requests like earlier ones."""
