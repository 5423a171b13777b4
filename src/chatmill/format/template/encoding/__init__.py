"""Renderings to Rows: `layout` divides a rendering into cells, `encode` encodes the cells of many records at once."""
