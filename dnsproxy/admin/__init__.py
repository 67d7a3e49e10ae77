"""What people and monitoring see of the running proxy, and what they may ask of it."""
