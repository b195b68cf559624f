"""HTML pages that colour every token by its source, and the table of these colours."""
