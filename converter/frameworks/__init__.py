"""What batches arrive as: one file or folder for each framework, and only it imports that framework.

A new framework is one file here that turns runs of rows into its own batches, and one class in
tests/integration/test_framework_contract.py that passes the contract of all frameworks (tests/contracts/frameworks.py).
"""
