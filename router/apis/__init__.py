"""The APIs that clients speak: how their bodies are read, and what is read off the answers."""
