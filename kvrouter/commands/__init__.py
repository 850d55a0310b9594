"""The subcommands of `kvrouter`, by what they are for. Each imports what it runs when it runs."""
