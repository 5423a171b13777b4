"""Tests of remote objects, against servers on this machine."""
