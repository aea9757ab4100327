"""The admin shell: look at a run and change it while it goes on (``bin/admin``)."""
