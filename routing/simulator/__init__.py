"""Engines, traces and faults in virtual time. Pure: no clock, no I/O, the same seed gives the same run."""
