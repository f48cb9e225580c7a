"""Draft heads in the formats that others publish: their files, networks and conventions, a module for each format."""
