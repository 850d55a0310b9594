"""What `serve --processes N` rests on: who reads the events, and how connections spread (`make bench-processes`)."""
