"""The cost of placing a prompt, by the number of targets and the number that hold it (`make bench-placement`)."""
