"""As what rows arrive: one file or folder for each framework, and only it imports that framework.

A new framework is one file here that turns runs of batches into its own, and the contract test that all frameworks pass
(tests/contracts/frameworks.py).
"""
