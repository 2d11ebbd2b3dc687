"""Tests. A package by its own right: others install one of this name, too, which must not be taken instead."""
