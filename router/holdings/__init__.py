"""What ranks hold beside what events tell: prompts in flight, what was sent there, and whether that is right."""
