"""Keeps outputs to their grammars.

`llguidance` says which tokens may come next; a mask of them goes to the device with every step (`device.sampling`).
"""
