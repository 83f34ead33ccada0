"""Admission: which requests go to the workers now, which wait, and which are refused."""

from epd.coordinator.admission.gate import AdmissionGate
from epd.coordinator.admission.request_class import CLASS_HEADER, class_of
from epd.coordinator.admission.scheduler import Scheduler
from epd.coordinator.admission.ticket import StageWork, Ticket, TicketState

__all__ = [
    "CLASS_HEADER",
    "AdmissionGate",
    "Scheduler",
    "StageWork",
    "Ticket",
    "TicketState",
    "class_of",
]
