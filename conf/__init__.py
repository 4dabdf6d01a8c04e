"""The configuration files (YAML) as a package: an installed copy finds them from any folder.

Holds no code.
"""
