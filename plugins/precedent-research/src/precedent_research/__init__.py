"""Systems of research papers: judges of lossy verification, and how they are trained."""
