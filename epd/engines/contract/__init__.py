"""What our own engines share of the workers' contract: rooms, calls to peers, OpenAI's answers.

Knows no engine and no tensors; see docs/contract.md for the endpoints.
"""
