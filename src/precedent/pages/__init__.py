"""HTML pages that colour every token by its source, the table of these colours, and pictures of candidate trees."""
