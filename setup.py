"""Build hook: setuptools reads everything else from pyproject.toml; cffi needs this one keyword."""

from setuptools import setup

setup(cffi_modules=["shared/native/build.py:ffi"])
