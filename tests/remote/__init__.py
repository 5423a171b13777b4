"""Tests of remote objects with servers on this machine."""
