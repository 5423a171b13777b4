"""Tests of objects at URLs, against servers that run on this machine."""
