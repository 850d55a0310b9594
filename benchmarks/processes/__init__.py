"""The basis of `serve --processes N`: the reader of events, and the spread of connections (`make bench-processes`)."""
