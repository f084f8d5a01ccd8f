"""Files on NVMe: run directories, volumes, engines, and the speed of drives."""
