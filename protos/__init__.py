"""The wire: protobuf messages, v2 datatypes and the tensor codec. Knows nothing of the rest of paceline."""
