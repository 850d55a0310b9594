"""The offline tools of the command: demo, doctor, top, recordings, replays, and traces."""
