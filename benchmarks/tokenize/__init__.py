"""The cost of a conversation's next turn before it can be routed: decoding, rendering, tokenizing, hashing."""
