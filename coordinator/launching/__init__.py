"""How the processes of a run get onto their hosts: a bare host list, Slurm, Kubernetes, systemd."""
