"""Everything that happens after a preset has been accepted. Importing the package itself loads nothing heavy."""
