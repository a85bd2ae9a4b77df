"""What runs on the ranks and in the driver. Importing this package alone loads nothing heavy."""
