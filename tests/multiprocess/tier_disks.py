"""The local directories of a job of four processes, with what tests do with all of them."""

from tier_scenarios import TWICE

COUNT = 4


class Place:
    """A run, and the local directories of the processes of a job."""

    def __init__(self, root):
        self.run = root / 'run'
        self.disks = [root / f'disk{index}' for index in range(COUNT)]

    def begin(self, job, leaves=TWICE, order=range(COUNT), **options):
        """Makes the checkpointers."""
        job.run('tiers', self.run, leaves, options, each=[str(self.disks[disk]) for disk in order])

    def steps_on(self, disk):
        return sorted(path.name for path in self.disks[disk].glob('checkpoint_*'))


def saved(job, place, steps, leaves=TWICE, **options):
    """Saves steps, waits for the uploads, and closes."""
    place.begin(job, leaves, **options)
    for step in steps:
        assert job.run('tiers_save', step) == [step] * COUNT
    assert job.run('tiers_wait') == [None] * COUNT
    job.run('tiers_close')


def restored(job, place, leaves=TWICE, order=range(COUNT), **options):
    """Restores as a new start; the answers."""
    place.begin(job, leaves, order, **options)
    answers = job.run('tiers_restore')
    job.run('tiers_close')
    return answers
