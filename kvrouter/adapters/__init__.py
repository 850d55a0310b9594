"""Interfaces of other projects over `kvrouter.selection`: docs/embed.md."""
