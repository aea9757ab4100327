"""What somebody needs who is to find out, from elsewhere, what is wrong with a run (``bin/support-bundle``)."""
