"""The command `prefrl`. Each of its commands stands in `prefrl.scripts.main` with the module that runs it."""
