"""One command a question, each against the peer a user would pick."""
