"""Conformance: answer random cases of the capture contract and compare with another's answers."""
