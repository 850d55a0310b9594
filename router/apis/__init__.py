"""The APIs of clients: how request bodies are parsed, and what is read from responses."""
