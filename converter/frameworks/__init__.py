"""As what rows arrive: one module for each framework, and only that module imports it."""
