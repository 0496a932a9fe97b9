"""placeholder while the tables are written."""
