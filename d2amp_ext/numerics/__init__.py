"""Which operators and modules stay in fp32, and what happens to values that are not finite."""
