"""A conftest puts its folder on the path, so that tests in the folders below import the helpers here."""
