"""Choices a second of the library `kvrouter.selection`, beside Dynamo's selection service in the same run."""
