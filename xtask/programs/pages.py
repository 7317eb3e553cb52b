"""A site of Django with a model, its administration's middleware and a template (`pages:application`)."""
import os
import sys
import tempfile

import django
from django.conf import settings
from django.core.wsgi import get_wsgi_application
from django.db import connection, models
from django.http import HttpResponse, JsonResponse
from django.template import engines
from django.urls import path

BASE = os.environ.get("PAGES_DIRECTORY") or tempfile.mkdtemp(prefix="pages-")
settings.configure(
    SECRET_KEY="for a benchmark", ALLOWED_HOSTS=["*"], ROOT_URLCONF=__name__, USE_TZ=True,
    DEFAULT_AUTO_FIELD="django.db.models.AutoField",
    INSTALLED_APPS=["django.contrib.auth", "django.contrib.contenttypes", "django.contrib.sessions"],
    MIDDLEWARE=["django.middleware.security.SecurityMiddleware", "django.contrib.sessions.middleware.SessionMiddleware",
                "django.middleware.common.CommonMiddleware", "django.contrib.auth.middleware.AuthenticationMiddleware"],
    SESSION_ENGINE="django.contrib.sessions.backends.signed_cookies",
    DATABASES={"default": {"ENGINE": "django.db.backends.sqlite3", "NAME": os.path.join(BASE, "pages.sqlite3")}},
    TEMPLATES=[{"BACKEND": "django.template.backends.django.DjangoTemplates"}],
)
django.setup()


class Book(models.Model):
    title = models.CharField(max_length=100)
    pages = models.IntegerField()

    class Meta:
        app_label = "pages"


def fill():
    with connection.schema_editor() as editor:
        editor.create_model(Book)
    Book.objects.bulk_create(Book(title=f"book {n}", pages=n % 700) for n in range(500))


LIST = engines["django"].from_string("""
<h1>{{ books|length }} books of {{ user.username|default:"nobody" }}</h1>
{% for book in books %}{% if book.pages > 10 %}<li>{{ book.title|title }}, {{ book.pages }} pages</li>{% endif %}{% endfor %}
""")


def listed(request):
    books = Book.objects.filter(pages__gt=5).order_by("-pages", "title")[:60]
    return HttpResponse(LIST.render({"books": list(books), "user": request.user}, request))


def counted(request):
    return JsonResponse(Book.objects.aggregate(models.Sum("pages"), models.Max("pages")))


urlpatterns = [path("", listed), path("orders", counted)]
application = get_wsgi_application()
if __name__ == "__main__" and sys.argv[1:] == ["fill"]:
    fill()
