"""The subcommands of `kvrouter`, by purpose. Each imports its implementation when it runs."""
