"""What a conversation's next turn costs before it can be routed: decoding, rendering, tokenizing, hashing."""
