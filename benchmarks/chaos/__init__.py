"""The view of clients while workers are killed, hang, slow down, restart and refuse: one fault at a time."""
