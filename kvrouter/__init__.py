"""The `kvrouter` command."""
