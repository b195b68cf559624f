"""HTML pages on which every token is coloured by its source, and the one table of these colours."""
