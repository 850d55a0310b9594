"""Workers without a GPU (`simulator.worker`), and fleets of them in virtual time (`simulator.fleet`)."""
